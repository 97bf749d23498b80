"""Language models as the stages share them: find, load, chat templates, adapters, generation."""
