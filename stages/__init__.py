"""The stages of the pipeline, one module each; run them with `dvc repro` or `python -m stages.NAME`."""
