"""The tests, room by room: `python3 -m unittest`, or `python3 -m unittest tests.test_http` for one of them.

section of the module          where its promises are tested
terminal and files             test_terminal (printing, pipes, full disks, encodings), test_notebook (files and locks)
prompts                        test_prompts
engines                        test_engines (recognition); what each one tells of drafts: test_acceptance
arithmetic                     test_arithmetic, with the command `break-even`
statistics                     test_statistics
HTTP client                    test_http (what is read and sent), test_http_failures (a failure never becomes a speed)
Prometheus scraper             test_scraper; against the official parser: test_prometheus_reference
acceptance                     test_acceptance
servers                        test_servers
timing loop                    test_timing_loop
text comparison                test_texts
comparison                     test_comparison (runs, candidates, verdicts), test_findings (each finding)
records and notebook           test_records (what records and run files hold), test_notebook (appending, reading),
                               test_schema (what is damaged, anywhere in them)
measurement                    test_measurement (levels of load, failures)
report                         test_report, test_history (over time, alarms, exit codes)
reference and calibration      test_reference
command line                   test_command_line

Across the rooms:
test_house                     how the module is built: its map is true, nothing is worked out twice
test_interrupted               Ctrl-C and signals, at any moment: what was finished is kept
test_secrets                   no key gets out, whichever way
test_published_runs            figures that people posted, through the whole program
test_readme                    the README promises only what the program does
test_llama_cpp                 real llama.cpp servers (real_engine starts them); skipped where they are not installed
test_fakes                     the fake servers do what all others take for granted

support.py holds what several files share: the program in this process (`run_main`, `measure`) and in one of its own
(`Program`), raw answers, run files with planted figures. fakes.py holds the servers: `FakeServer` plays any engine with
known truth and faults, `ReplayServer` gives recorded bytes. data/ has a README in each of its folders. The benchmarks,
bench_*.py, are no tests: `python3 -m tests.bench_client`, each with bounds of its own.

A new test belongs to the section whose promise it keeps, in the class that speaks of the matter, under a name that is
the promise: `test_a_failed_request_never_becomes_a_speed`. What goes wrong belongs there too: an odd counter to
acceptance, a broken stream to the HTTP client. Only an early end and a terminal that fails have rooms of their own.
It goes through the whole program where it can, and compares `assertEqual(seen, expected)`. A helper that a second file
needs moves to support.py.
"""
