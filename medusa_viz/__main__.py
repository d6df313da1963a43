"""python -m medusa_viz"""

import sys

try:
    from medusa_viz.cli import main

    sys.exit(main())
except KeyboardInterrupt:  # also while the imports run
    sys.exit(130)
