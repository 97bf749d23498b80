"""Full fine-tuning in little device memory: layers are streamed from host memory, which holds everything."""
