"""`python -m kernelhead_lab` is `kernelhead-lab`."""

from kernelhead_lab.cli import main

main()
