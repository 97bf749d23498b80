"""`graft release …`: what was released, what is live, and back."""

import gc

import typer

from graftwork.cli import (
    release_ab,
    release_export,
    release_gc,
    release_import,
    release_lineage,
    release_list,
    release_make,
    release_promote,
    release_push,
    release_remark,
    release_show,
    release_sign,
)

app = typer.Typer(help="What was released, what is live, and the way back.", no_args_is_help=True)


@app.callback()
def _begin() -> None:
    # These verbs are short and mostly load code: objects by the ten thousand, of which none is garbage yet.
    # Looking for some after every 700, as Python does, takes five to ten per cent of a rollback.
    gc.set_threshold(50_000, 20, 50)


app.command("list")(release_list.list_)
app.command("show")(release_show.show_)
app.command("verify")(release_show.verify)
app.command("log")(release_show.log)
app.command("lineage")(release_lineage.lineage)
app.command("make")(release_make.make)
app.command("promote")(release_promote.promote)
app.command("rollback")(release_promote.rollback)
app.command("tag")(release_remark.tag)
app.command("note")(release_remark.note)
app.command("version")(release_remark.version)
app.command("sign")(release_sign.sign)
app.command("keygen")(release_sign.keygen)
app.command("gc")(release_gc.gc)
app.command("export")(release_export.export)
app.command("import")(release_import.import_)
app.command("push")(release_push.push)
app.command("pull")(release_push.pull)
app.command("ab")(release_ab.ab)
