"""Every test that docs/guarantees.md names exists: guarantees.py GUARANTEES.md TEST_PROGRAM..."""

import re
import subprocess
import sys

document, *programs = sys.argv[1:]
suites = set()
for program in programs:
    listed = subprocess.run([program, "--gtest_list_tests"], check=True, capture_output=True, text=True).stdout
    suites |= {line.rstrip(".").split("/")[-1] for line in
               (text.split(" ")[0] for text in listed.splitlines()) if line.endswith(".")}
named = set()
with open(document) as text:
    for row in text:
        if row.startswith("| ") and "`" in row.rsplit("|", 2)[1]:
            named |= set(re.findall(r"`([A-Z][A-Za-z]+)[`.]", row.rsplit("|", 2)[1]))
missing = sorted(named - suites)
if missing or len(named) < 20:
    sys.exit(f"{document} names tests that do not exist: {', '.join(missing)} ({len(named)} named)")
print(f"{len(named)} test suites named, all there")
