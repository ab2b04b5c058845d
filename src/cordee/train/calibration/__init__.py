"""Probes of a device with torch: `python -m cordee.train.calibration`, started by `cordee calibrate`.

Products, attention, small operations, optimizer, host, copies and collectives, each timed until it is steady, one JSON
object a line. They know no catalogue and write no file: `agent/calibration/` does.
"""
