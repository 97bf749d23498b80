"""The public API behind `import graftwork`: a project and its steps as typed Python calls."""
