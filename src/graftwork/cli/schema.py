"""`graft schema`: the JSON Schema of graft.yaml, for editors."""


def schema() -> None:
    """Print the JSON Schema of graft.yaml.

    Example:  graft schema > graft.schema.json
    """
    from graftwork.cli.output import print_json
    from graftwork.project.settings import ProjectSettings

    print_json(ProjectSettings.model_json_schema())
