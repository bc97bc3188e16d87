"""What the library's shortcuts cost and save, as ratios of two ways to the same result, measured in one process.

`python -m benchmarks` measures all of it on this machine and writes figures/nano/performance/: a CSV for each module
here, `summary.csv` (against the targets), the figure, and the paragraph of README.md. Run it while nothing else runs.
Each module also runs alone (`python -m benchmarks.capture --help`).
"""
