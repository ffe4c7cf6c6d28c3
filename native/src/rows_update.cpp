// Writing rows: replacing them, or updating them with an optimizer.
#include <cmath>
#include <vector>

#include "rows_access.h"

namespace phalanx {
namespace {

constexpr std::size_t kPrefetchAhead = 4;

// The arithmetic of PyTorch's optimizers on sparse gradients (torch.optim.SGD, Adagrad,
// SparseAdam), operation by operation, in the table's own type. Values that differ between steps
// are passed as factors.
template <class T>
struct Factors {
  Factors(const OptimizerStep& step, double number)
      : eps(static_cast<T>(step.eps)),
        left1(static_cast<T>(1 - step.beta1)),
        left2(static_cast<T>(1 - step.beta2)) {
    double size = step.lr;
    if (step.optimizer == RowOptimizer::adagrad) {
      size /= 1 + (number - 1) * step.lr_decay;
    } else if (step.optimizer == RowOptimizer::adam) {
      size *= std::sqrt(1 - std::pow(step.beta2, number)) / (1 - std::pow(step.beta1, number));
    }
    minus_size = static_cast<T>(-size);
  }

  T minus_size;
  T eps;
  T left1;
  T left2;
};

// The parts of a row before and after a step; parts that an optimizer lacks are not used.
constexpr std::uint32_t kOptimizerParts = 3;
template <class T>
struct Change {
  const T* old[kOptimizerParts];
  T* fresh[kOptimizerParts];
};

template <class T>
void sgd(const Change<T>& row, const T* __restrict gradient, std::size_t width,
         const Factors<T>& by) {
  T* __restrict fresh = row.fresh[0];
  for (std::size_t i = 0; i < width; ++i) {
    fresh[i] = row.old[0][i] + by.minus_size * gradient[i];
  }
}

template <class T>
void adagrad(const Change<T>& row, const T* __restrict gradient, std::size_t width,
             const Factors<T>& by) {
  T* __restrict fresh = row.fresh[0];
  T* __restrict sum = row.fresh[1];
  for (std::size_t i = 0; i < width; ++i) {
    sum[i] = row.old[1][i] + gradient[i] * gradient[i];
    fresh[i] = row.old[0][i] + by.minus_size * (gradient[i] / (std::sqrt(sum[i]) + by.eps));
  }
}

template <class T>
void adam(const Change<T>& row, const T* __restrict gradient, std::size_t width,
          const Factors<T>& by) {
  T* __restrict fresh = row.fresh[0];
  T* __restrict first = row.fresh[1];
  T* __restrict second = row.fresh[2];
  for (std::size_t i = 0; i < width; ++i) {
    first[i] = row.old[1][i] + (gradient[i] - row.old[1][i]) * by.left1;
    second[i] = row.old[2][i] + (gradient[i] * gradient[i] - row.old[2][i]) * by.left2;
    fresh[i] = row.old[0][i] + by.minus_size * (first[i] / (std::sqrt(second[i]) + by.eps));
  }
}

}  // namespace

RowsResult Rows::write(const RowList& list, const void* const* parts, Timeout timeout) {
  if (const RowsResult result = check(list); !result.ok()) {
    return result;
  }
  RowWriterSlot slot(*this, timeout);
  if (!slot.valid()) {
    return slot.stuck(0);
  }
  for (std::size_t i = 0; i < list.count; ++i) {
    if (i + kPrefetchAhead < list.count) {
      prefetch(static_cast<std::uint64_t>(list.rows[i + kPrefetchAhead]), shape_.parts);
    }
    if (!slot.acquire(static_cast<std::uint64_t>(list.rows[i]))) {
      return slot.stuck(i);
    }
    for (std::uint32_t part = 0; part < shape_.parts; ++part) {
      if (parts[part] != nullptr) {
        slot.store(part, static_cast<const std::byte*>(parts[part]) + i * row_bytes());
      }
    }
    slot.release();
  }
  return {};
}

template <class T>
RowsResult Rows::update_as(const RowList& list, const T* gradients, const OptimizerStep& step,
                           Timeout timeout) {
  RowWriterSlot slot(*this, timeout);
  if (!slot.valid()) {
    return slot.stuck(0);
  }
  // Only a count: the locks order the contents of the rows.
  const std::uint64_t number =
      step.number > 0 ? step.number : header().step.fetch_add(1, std::memory_order_relaxed) + 1;
  const Factors<T> by(step, static_cast<double>(number));
  const auto apply = step.optimizer == RowOptimizer::adam      ? &adam<T>
                     : step.optimizer == RowOptimizer::adagrad ? &adagrad<T>
                                                               : &sgd<T>;
  const std::size_t width = shape_.width;
  std::vector<T> fresh(step.parts() * width);
  for (std::size_t i = 0; i < list.count; ++i) {
    if (i + kPrefetchAhead < list.count) {
      prefetch(static_cast<std::uint64_t>(list.rows[i + kPrefetchAhead]), shape_.parts);
    }
    if (!slot.acquire(static_cast<std::uint64_t>(list.rows[i]))) {
      return slot.stuck(i);
    }
    Change<T> row{};
    for (std::uint32_t part = 0; part < kOptimizerParts; ++part) {
      const std::uint32_t used = std::min(part, step.parts() - 1);
      row.old[part] = reinterpret_cast<const T*>(slot.old(used));
      row.fresh[part] = fresh.data() + used * width;
    }
    apply(row, gradients + i * width, width, by);
    for (std::uint32_t part = 0; part < step.parts(); ++part) {
      slot.store(part, reinterpret_cast<const std::byte*>(row.fresh[part]));
    }
    slot.release();
  }
  return {};
}

RowsResult Rows::update(const RowList& list, const void* gradients, const OptimizerStep& step,
                        Timeout timeout) {
  if (const RowsResult result = check(list); !result.ok()) {
    return result;
  }
  if (shape_.dtype == DType::float64) {
    return update_as(list, static_cast<const double*>(gradients), step, timeout);
  }
  return update_as(list, static_cast<const float*>(gradients), step, timeout);
}

}  // namespace phalanx
