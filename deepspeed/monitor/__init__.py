"""Where a run's numbers go: CSV files, TensorBoard, Weights & Biases."""
