# Each target is one line that a person can also type. Run it in the checkout.
.PHONY: demo test test-vm bench lint setup

# Serve two LUNs, copy a file in and out, verify a random load. DEMO_SECONDS=3 for a short one.
demo:
	.ci/demo

# Format, lints, all tests; prints the counts.
test: lint
	.ci/test

# The Linux kernel's own SRP initiator against usurp, in a QEMU guest with soft RDMA. For some cases
# only: tests/vm/run CASE...; what CI runs: tests/vm/run --quick.
test-vm:
	tests/vm/run

# Measures the whole path, four minutes; ARGS=--quick: one. docs/performance.md says how to read it.
bench:
	.ci/cargo build --release -p usurp-target -p usurp-bench && "$${CARGO_TARGET_DIR:-build}"/release/usurp-matrix $(ARGS)

lint:
	.ci/lint

# What the build needs from the system; installs it if it may.
setup:
	.ci/setup
