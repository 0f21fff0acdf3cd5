# SPDX-License-Identifier: Apache-2.0
import sys

from benchmarks.compare.command import main

sys.exit(main())
