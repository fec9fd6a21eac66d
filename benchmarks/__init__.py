"""One script per number. As in the app, torch's threads do not spin while they wait; it reads that when imported."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
