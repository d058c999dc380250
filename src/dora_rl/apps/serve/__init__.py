"""`dora-rl serve`: a live, read-only web page about runs.

    runs_folder   which folders are served, and that no other file can be read
    tail          new lines of a growing file
    lanes         the timeline of all slots in bounded memory, sampled to the width of a screen
    live_run      one run, read incrementally
    overview, versions, training, trajectories, system    the data of each view
    app           routes, the stream of changes
    guard         hosts, token, methods and headers of every request and response
    command       the command, and the process beside a run that `dora-rl train --page` starts

Invariants:
- nothing is written, and no request has an effect besides reading;
- all text from a run reaches the page as JSON and is inserted as text, never as HTML;
- the size of an answer is bounded by the pixels or rows that were asked for, however long the run is.
"""
