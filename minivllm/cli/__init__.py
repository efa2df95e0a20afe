"""The command line, a file a command: each has `configure(parser)`, its options, and `run(args)`, which prints and
returns the exit code. What they print is computed in `minivllm.theory` and `minivllm.drills`."""
