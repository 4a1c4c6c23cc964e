"""`python -m annulus` prints what annulus found on this machine, as `annulus.doctor` returns it."""

from . import doctor

print(doctor())
