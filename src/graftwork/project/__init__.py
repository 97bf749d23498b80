"""graft.yaml: the settings of all stages, composed and checked; the project's folder."""
