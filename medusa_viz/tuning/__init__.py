"""Which tree: builders that choose a tree shape from measured head accuracies."""
