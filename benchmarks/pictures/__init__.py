"""The pictures in the documentation, made anew: `python -m benchmarks.pictures FOLDER`. Needs Chromium and its driver."""
