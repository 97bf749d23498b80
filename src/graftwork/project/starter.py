"""The graft.yaml that a new project starts from: short, with the keys that one changes first."""

STARTER = """\
# yaml-language-server: $schema=graft.schema.json
# `graft schema > graft.schema.json` lets your editor complete and check this file.
project: {name}
base: smollm2-135m-instruct     # the embedded model; or the path of a model folder

data:
  logs: [{logs}]
  # system_prompt: |            # in place of the logged one
  #   You answer in JSON …
  test: 0.2                     # share of the question groups that is held out
  validation: 0.1

train:
  rank: 8
  alpha: 16
  epochs: 2
  learning_rate: 5.0e-4
  # upper_layers: 15            # adapt only the upper layers: faster on a processor

evaluate:
  max_new_tokens: 96

gate:
  rules:                        # rates are held by the lower bound of their interval
    - {{metric: json_valid, over: 0.95}}
    - {{metric: refusal_correct, over: 0.80}}

serve:
  port: 8080
"""


def write_starter(*, name: str, logs: str) -> str:
    return STARTER.format(name=name, logs=logs)
