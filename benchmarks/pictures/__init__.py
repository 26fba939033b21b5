"""Create the pictures of the documentation: `python -m benchmarks.pictures FOLDER`. Needs Chromium and its driver."""
