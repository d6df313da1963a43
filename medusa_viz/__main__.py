"""python -m medusa_viz"""

import sys

from medusa_viz.cli import main

sys.exit(main())
