"""Cache layers of mlx-lm to blobs and back: classes, slicing, restore."""
