"""Files and folders: safetensors, JSON by tables, manifests, hashes, locks, and writes that appear whole."""
