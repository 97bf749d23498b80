"""Where rows come from: `find` names the files, `blocks` cuts each into blocks of JSON lines.

Below `blocks`, one file a container (`lines`, `array`, `table`, `parquet`), and `stream` for the
bytes, packed or not. None of them knows what a row means.
"""
