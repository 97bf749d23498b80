"""Words of the made-up logs of the flow tests."""

PLANTS = [
    "fern",
    "moss",
    "ivy",
    "lotus",
    "maple",
    "willow",
    "cedar",
    "thyme",
    "sage",
    "basil",
    "orchid",
    "lily",
    "tulip",
    "rose",
    "iris",
    "daisy",
]
PLACES = ["pond", "gate", "wall", "court", "terrace", "orchard", "glasshouse", "meadow"]
