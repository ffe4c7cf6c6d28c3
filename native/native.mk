# How the core is checked and tested. tools/gate.py runs what is here again if something below native/ changes.

native-test: ## the core's tests: plain, under ASan with UBSan, and under TSan
	$(submake) native-plain
	$(submake) native-asan
	$(submake) native-tsan

native-plain: SANITIZE :=
native-asan: SANITIZE := address,undefined
native-tsan: SANITIZE := thread

# A finding of a sanitizer ends the test, by default UBSan only prints it.
export ASAN_OPTIONS := detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS := halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS := halt_on_error=1:second_deadlock_stack=1
# TSan can't start under the address randomisation of newer kernels ("unexpected memory mapping"),
# and some containers forbid to switch that off: so it is tried.
native-tsan: WRAP = $$(setarch -R true 2>/dev/null && echo setarch -R || true)

native-plain native-asan native-tsan: $(VENV)/.build-tools ## one of the three (ARGS="-R wait" chooses)
	$(call section,Native tests$(if $(SANITIZE), under -fsanitize=$(SANITIZE)))
	@cmake -S . -B build/$@ -G Ninja --log-level=WARNING -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
	  -DPHALANX_PYTHON=OFF -DPHALANX_TESTS=ON -DPHALANX_SANITIZE=$(SANITIZE) >/dev/null
	@cmake --build build/$@ --parallel $(JOBS) --target $(or $(TARGETS),all) -- --quiet
	@$(WRAP) ctest --test-dir build/$@/native --parallel $(JOBS) --no-tests=error --output-on-failure \
	  $(OPTIONS) $(ARGS)

# One stamp per source that clang-tidy found clean; any changed header makes it look at all again.
TIDY_DIR := build/clang-tidy
TIDY := $(SOURCES:%=$(TIDY_DIR)/%.ok)

tidy: $(TIDY) ## clang-tidy

$(TIDY_DIR)/%.ok: % $(HEADERS) $(CMAKE_LISTS) .clang-tidy native/tests/.clang-tidy | $(TIDY_DIR)/compile_commands.json
	@echo $<
	@clang-tidy --quiet -p $(TIDY_DIR) $< 2> >(grep -v 'warnings\? generated' >&2 || true)
	@mkdir -p $(@D) && touch $@

# Configured, never built: the compiler's options for every source, bindings and tests included.
# (A directory changes when a file comes or goes.)
$(TIDY_DIR)/compile_commands.json: $(VENV)/.build-tools $(CMAKE_LISTS) $(shell find native -type d)
	@cmake -S . -B $(TIDY_DIR) -G Ninja --log-level=WARNING -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
	  -DPHALANX_TESTS=ON -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
	  -Dnanobind_DIR="$$(python -m nanobind --cmake_dir)" >/dev/null
	@touch $@

# A part of it is a test of native-plain.
kills: ARGS := --all --random 100000
kills: $(VENV)/.build-tools ## kill ranks at every step of every operation, in every order of ranks
	$(submake) native-plain ARGS="-R test_steps"
	$(call section,Killing ranks at every step)
	@build/native-plain/native/tests/test_rank_deaths $(ARGS)

model: ## check the models of the protocol with Spin (ARGS=--long for all of it)
	$(call section,Models of the protocol)
	@$(PYTHON) native/model/check.py $(ARGS)

mutants: $(VENV)/.build-tools ## make one mistake at a time in the core, and see that it is found
	$(call section,Mutants)
	@python native/mutants/run.py $(ARGS)
