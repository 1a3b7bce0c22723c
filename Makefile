# Each target is one line that a person can also type. Run it in the checkout.
.PHONY: demo test bench lint setup

# Serve two LUNs, copy a file in and out, verify a random load. DEMO_SECONDS=3 for a short one.
demo:
	.ci/demo

# Format, lints, all tests; prints the counts.
test: lint
	.ci/test

bench:
	.ci/cargo bench -p usurp-bench

lint:
	.ci/lint

# What the build needs from the system; installs it if it may.
setup:
	.ci/setup
