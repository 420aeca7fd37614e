import sys

from kernels.bench.attention import main

sys.exit(main())
