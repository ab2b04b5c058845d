"""Calibrations: probes started and heard, the device's fingerprint, who else is there, and the file that results.

The probes themselves, which need torch, are processes of `train/calibration/`; what their samples mean is
`hardware/calibration.py`.
"""
