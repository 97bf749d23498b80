"""The steps of `graft run`: each a `PipelineStep`, below the functions that do it."""
