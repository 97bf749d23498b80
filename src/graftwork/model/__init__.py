"""The language model as the stages share it: find, load, template and mask, adapter, generate."""
