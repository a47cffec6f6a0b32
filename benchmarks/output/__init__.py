"""What a run looks like, each made from the contents of its JSON file alone.

============  ======================================================
``sections``  what is told, as text
``tables``    the terminal
``files``     the JSON file, read and written
``plots``     PNG and HTML: memory against time
``page``      the results page of the documentation
============  ======================================================
"""
