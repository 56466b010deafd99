"""What `petune init`, `check`, `convert` and `script` do before anything is trained."""
