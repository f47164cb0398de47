"""Checks of `treadle env NAME validate`: is a task fit to be trained on?"""
