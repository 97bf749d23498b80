"""Where the figures of a run can go besides its own folder, one file a tracker, named in graft.yaml.

Every file has PACKAGE (what must be installed) and `open_run(run_id, settings, folder)`, which gives
a handle with `log(step, figures)` and `close()`. None reaches for the network unless the user's own
environment names a server. To add one: write such a file, and add its name to `Tracker` in the
training settings.
"""
