"""Every piece of C++ that docs/migration.md quotes is in a compiled test: migration.py MIGRATION.md TEST.cpp"""

import re
import sys


def normal(text):
    return re.sub(r"\s+", " ", text)


document, source = (open(path).read() for path in sys.argv[1:])
compiled = normal(source)
quoted = [span for row in document.splitlines() if row.startswith("| ")
          for span in re.findall(r"`([^`]+)`", row.rstrip().rstrip("|").rsplit(" | ", 1)[-1])]
quoted += [line for block in re.findall(r"```cpp\n(.*?)```", document, re.S) for line in block.splitlines() if line.strip()]
missing = [code for code in quoted if normal(code).strip() not in compiled]
if missing or len(quoted) < 50:
    sys.exit("not in the compiled test (%d quoted):\n  " % len(quoted) + "\n  ".join(missing))
print(f"{len(quoted)} pieces of code quoted, all compiled")
