"""The daemon's shell: tasks that wait, connections, copies; policy lives in `trikv.core`."""
