// Ranks that are killed before each step that touches shared memory. Whatever they were doing, all
// others report the lost rank soon and leak nothing, and results that were reported as ok are
// right.
//
//   test_rank_deaths                         every step x rank x operation at 2 and 3 ranks, in one
//                                            of the orders of beginning, and some second deaths;
//                                            1000 random cases
//   test_rank_deaths --all --random 100000   the same in every order, and every second death
//   test_rank_deaths --case '...'            one case, as a failure prints it
#include <algorithm>
#include <map>
#include <random>
#include <string_view>

#include "kill_runner.h"

using namespace kills;

namespace {

struct Options {
  bool all = false;
  std::uint64_t random = 1000;
  std::uint64_t seed = std::random_device{}();
  int workers = 8;
  std::string only;  // only this operation
  std::string one_case;
};

std::vector<Case> exhaustive_cases(const Options& options) {
  std::vector<Case> all;
  for (const int size : {2, 3}) {
    for (int number = 0; number < kOperations; ++number) {
      for (const Path path : {Path::small, Path::staged, Path::zero_copy, Path::full}) {
        if (!has_path(static_cast<Operation>(number), path)) continue;
        if (path == Path::full && size != 2) continue;  // a channel has two sides
        if (!options.only.empty() &&
            options.only != kOperationNames[static_cast<std::size_t>(number)])
          continue;
        for (int victim = 0; victim < size; ++victim) {
          Case c;
          c.task = {.operation = static_cast<Operation>(number), .path = path, .size = size};
          c.victim = victim;
          c.every_word = options.all;
          all.push_back(c);
          if (size == 3 && path == Path::small && collective(c.task.operation)) {
            c.task.fan = 1;  // a chain: each rank has another part in it
            all.push_back(c);
            c.task.fan = 0;
          }
          if (size == 3 && path == Path::staged && reduces_over_caches(c.task.operation)) {
            c.task.fan = 2;  // two ranks of one cache, and one of another
            all.push_back(c);
            c.task.fan = 0;
          }
          if (!options.all && victim != number % size) continue;
          for (int second = 0; size == 3 && second < size; ++second) {
            if (second == victim) continue;
            c.second = second;
            all.push_back(c);
          }
        }
      }
    }
  }
  return all;
}

Case random_case(std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  const auto below = [&](int n) { return static_cast<int>(engine() % static_cast<unsigned>(n)); };
  Case c;
  do {
    c.task.operation = static_cast<Operation>(below(kOperations));
    c.task.path = static_cast<Path>(below(4));
  } while (!has_path(c.task.operation, c.task.path));
  c.task.size = 2 + below(kMaxRanksOfACase - 1);
  c.task.root = below(c.task.size);
  c.task.fan = c.task.size > 2 ? below(3) : 0;
  c.task.salt = seed;
  c.victim = below(c.task.size);
  const int most = c.task.path == Path::small ? 50 : 200;
  c.fatal = static_cast<std::uint32_t>(1 + below(most));
  if (c.task.size > 2 && below(3) == 0) {
    c.second = (c.victim + 1 + below(c.task.size - 1)) % c.task.size;
    c.second_fatal = static_cast<std::uint32_t>(1 + below(most));
  }
  c.order = static_cast<Order>(below(c.task.size > 2 && c.second < 0 ? 4 : 3));
  c.yields = below(2) == 0;
  return c;
}

// The loop of a worker: takes the next case until there is none.
void run_cases(CaseRunner& runner, Shared& shared, const Options& options) {
  const std::vector<Case> cases = exhaustive_cases(options);
  const std::uint64_t kinds = options.all ? kOrderNames.size() : 1;
  const std::uint64_t exhaustive = cases.size() * kinds;
  while (shared.failures.load() < CaseRunner::kMaxFailures) {
    const std::uint64_t number = shared.next.fetch_add(1);
    if (number >= exhaustive + options.random) return;
    if (number >= exhaustive) {
      runner.run(random_case(options.seed + number - exhaustive));
      continue;
    }
    const Case& c = cases[number / kinds];
    const auto order = static_cast<Order>(number % kinds);
    if (!options.all) {
      runner.run_all_steps(c, std::nullopt);
    } else if (order != Order::last_alone || (c.task.size > 2 && c.second < 0)) {
      runner.run_all_steps(c, order);
    }
  }
}

int run_worker(Shared& shared, const Options& options) {
  const Resources before = Resources::now();
  CaseRunner runner(shared);
  if (!options.one_case.empty()) {
    runner.run(case_of(options.one_case));
  } else {
    run_cases(runner, shared, options);
  }
  const bool clean = Resources::now() == before && waitpid(-1, nullptr, WNOHANG) < 0;
  if (!clean) std::fputs("FAILED: resources were leaked\n", stderr);
  return clean ? 0 : 1;
}

// Whether every step that was passed was also the last step of some rank.
bool every_step_was_fatal(const Shared& shared) {
  std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> steps;
  for (const auto& entry : shared.steps.entries) {
    if (entry.step.load() == nullptr) continue;
    auto& [passed, deaths] = steps[entry.step.load()];
    passed += entry.passed.load();
    deaths += entry.deaths.load();
  }
  bool all = !steps.empty();
  std::printf("%-32s %10s %12s\n", "step", "deaths", "passed");
  for (const auto& [step, counts] : steps) {
    const auto& [passed, deaths] = counts;
    std::printf("%-32s %10llu %12llu\n", step.c_str(), static_cast<unsigned long long>(deaths),
                static_cast<unsigned long long>(passed));
    all = all && deaths != 0;
  }
  return all;
}

void print_latencies(const Shared& shared) {
  const std::size_t n = std::min(shared.n_latencies.load(), kMaxLatencies);
  std::vector<std::int32_t> all(shared.latencies.begin(),
                                shared.latencies.begin() + static_cast<std::ptrdiff_t>(n));
  std::sort(all.begin(), all.end());
  if (all.empty()) return;
  const auto at = [&](double part) {
    return all[static_cast<std::size_t>(part * static_cast<double>(n - 1))] / 1000.0;
  };
  std::printf("survivors were notified after: half of them %.1f ms, 99%% %.1f ms, all %.1f ms\n",
              at(0.5), at(0.99), at(1));
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--all") {
      options.all = true;
    } else if (i + 1 < argc && word == "--random") {
      options.random = std::strtoull(argv[++i], nullptr, 10);
    } else if (i + 1 < argc && word == "--seed") {
      options.seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (i + 1 < argc && word == "--only") {
      options.only = argv[++i];
    } else if (i + 1 < argc && word == "--workers") {
      options.workers = std::max(1, std::atoi(argv[++i]));
    } else if (i + 1 < argc && word == "--case") {
      options.one_case = argv[++i];
      options.workers = 1;
    } else {
      std::fputs(
          "usage: test_rank_deaths [--all] [--random N] [--seed N] [--workers N] [--only "
          "OPERATION]\n"
          "                  [--case '...']\n",
          stderr);
      std::exit(2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  std::printf("seed %llu\n", static_cast<unsigned long long>(options.seed));
  std::fflush(stdout);
  auto& shared = in_shared_memory<Shared>();
  const auto start = Clock::now();
  std::vector<int> workers;
  for (int i = 0; i < options.workers; ++i) {
    workers.push_back(fork());
    if (workers.back() == 0) _exit(run_worker(shared, options));
  }
  bool good = true;
  for (const int runner : workers) {
    int status = 0;
    good = waitpid(runner, &status, 0) == runner && status == 0 && good;
  }
  const bool partial = !options.one_case.empty() || !options.only.empty();
  const bool covered = every_step_was_fatal(shared) || partial;
  if (!covered) std::fputs("FAILED: no rank died at some steps\n", stderr);
  const std::chrono::duration<double> took = Clock::now() - start;
  std::printf("%llu cases in %.1f s, %llu failures\n",
              static_cast<unsigned long long>(shared.cases.load()), took.count(),
              static_cast<unsigned long long>(shared.failures.load()));
  print_latencies(shared);
  return good && covered && shared.failures.load() == 0 ? 0 : 1;
}
