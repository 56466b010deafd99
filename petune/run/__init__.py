"""A run, from the recipe to the finished folder: build, train, evaluate, save, report."""
