"""The daemon's leak detector over a recorded past: would it have caught our outage?"""
