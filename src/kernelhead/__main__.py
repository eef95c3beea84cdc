"""`python -m kernelhead`."""

from kernelhead.cli import main

if __name__ == "__main__":
    main()
