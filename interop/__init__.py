"""Models as other people's files: configs, families, conversion rules, weight files, placement.

Everything here works on NumPy arrays and loads no array framework.
"""
