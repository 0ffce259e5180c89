"""Rescoring stored rollouts: from the words of a person to files and a table.

``reading`` finds rollouts in a workspace, ``planning`` makes settings of options and says what
would be asked, ``results`` asks it of judges, makes scores and numbers of that, leaves the files,
and says what is shown.
"""
