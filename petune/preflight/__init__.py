"""What `petune init` and `petune check` do before anything is trained."""
