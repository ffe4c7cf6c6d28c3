// Reading rows: unchanged, or pooled into bags.
#include <vector>

#include "rows_access.h"

namespace phalanx {
namespace {

constexpr std::size_t kBlock = RowReader::kBlock;
// The prefetch distance, in rows.
constexpr std::size_t kPrefetchAhead = 16;

RowsResult check(const Bags& bags, std::size_t count) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < bags.count; ++i) {
    const std::int64_t offset = bags.offsets[i];
    if (offset < last || offset > static_cast<std::int64_t>(count) || (i == 0 && offset != 0)) {
      return {.kind = RowsResult::Kind::offset, .at = i, .value = offset};
    }
    last = offset;
  }
  return {};
}

template <class T>
void divide(const Bags& bags, std::size_t count, std::size_t width, T* out) {
  for (std::size_t bag = 0; bag < bags.count; ++bag) {
    const std::int64_t begin = bags.offsets[bag];
    const std::int64_t end =
        bag + 1 < bags.count ? bags.offsets[bag + 1] : static_cast<std::int64_t>(count);
    for (std::size_t i = 0; i < width && end > begin; ++i) {
      out[bag * width + i] /= static_cast<T>(end - begin);
    }
  }
}

}  // namespace

// Prefetches the block that begins kPrefetchAhead after number i; at the beginning also those
// before it.
void Rows::prefetch_block(const RowList& list, std::size_t i, std::uint32_t parts) const {
  const std::size_t end = std::min(i + kPrefetchAhead + kBlock, list.count);
  for (std::size_t k = i == 0 ? 0 : i + kPrefetchAhead; k < end; ++k) {
    prefetch(static_cast<std::uint64_t>(list.rows[k]), parts);
  }
}

RowsResult Rows::gather(const RowList& list, void* const* parts, Timeout timeout) {
  if (const RowsResult result = check(list); !result.ok()) {
    return result;
  }
  const std::size_t size = row_bytes();
  std::uint32_t used_parts = shape_.parts;  // the parts after these are not requested
  while (used_parts > 0 && parts[used_parts - 1] == nullptr) {
    --used_parts;
  }
  RowReader reader(*this, timeout);
  for (std::size_t i = 0; i < list.count; i += kBlock) {
    const std::size_t count = std::min(kBlock, list.count - i);
    prefetch_block(list, i, used_parts);
    const std::size_t read = reader.read(list.rows + i, count, [&](std::size_t k) {
      const auto row = static_cast<std::uint64_t>(list.rows[i + k]);
      for (std::uint32_t part = 0; part < used_parts; ++part) {
        if (parts[part] != nullptr) {
          load_row(static_cast<std::byte*>(parts[part]) + (i + k) * size, words(part, row), size);
        }
      }
    });
    if (read != count) {
      return reader.stuck(i + read, list.rows[i + read]);
    }
  }
  return {};
}

template <class T>
RowsResult Rows::pool_as(const RowList& list, const Bags& bags, Pooling pooling, const T* weights,
                         T* out, Timeout timeout) {
  const std::size_t width = shape_.width;
  std::vector<T> block(kBlock * width);
  const kernels::CombineRows combine =
      kernels::in_use().combine_rows[static_cast<std::size_t>(shape_.dtype)];
  const auto use = pooling == Pooling::max ? kernels::RowCombine::max : kernels::RowCombine::sum;
  RowReader reader(*this, timeout);
  const auto end_of = [&](std::size_t bag) {
    return bag + 1 < bags.count ? static_cast<std::size_t>(bags.offsets[bag + 1]) : list.count;
  };
  std::size_t bag = 0;
  bool first = true;  // the first row of the bag
  // Advances to the bag that contains row number i; those before it are empty.
  const auto find = [&](std::size_t i) {
    for (; bag < bags.count && i == end_of(bag); ++bag, first = true) {
      if (first) {
        std::fill_n(out + bag * width, width, T{});
      }
    }
  };
  const std::size_t all = bags.count == 0 ? 0 : list.count;
  for (std::size_t i = 0; i < all; i += kBlock) {
    const std::size_t count = std::min(kBlock, all - i);
    prefetch_block(list, i, 1);
    const std::size_t read = reader.read(list.rows + i, count, [&](std::size_t k) {
      load_row(reinterpret_cast<std::byte*>(block.data() + k * width),
               words(0, static_cast<std::uint64_t>(list.rows[i + k])), row_bytes());
    });
    if (read != count) {
      return reader.stuck(i + read, list.rows[i + read]);
    }
    for (std::size_t k = 0, more = 0; k < count; k += more, first = false) {
      find(i + k);
      more = std::min(count - k, end_of(bag) - (i + k));
      combine(out + bag * width, block.data() + k * width, more, width, use,
              weights == nullptr ? nullptr : weights + i + k, first);
    }
  }
  find(all);
  if (pooling == Pooling::mean) {
    divide(bags, list.count, width, out);
  }
  return {};
}

RowsResult Rows::pool(const RowList& list, const Bags& bags, Pooling pooling, const void* weights,
                      void* out, Timeout timeout) {
  if (const RowsResult result = check(list); !result.ok()) {
    return result;
  }
  if (const RowsResult result = phalanx::check(bags, list.count); !result.ok()) {
    return result;
  }
  if (shape_.dtype == DType::float64) {
    return pool_as(list, bags, pooling, static_cast<const double*>(weights),
                   static_cast<double*>(out), timeout);
  }
  return pool_as(list, bags, pooling, static_cast<const float*>(weights), static_cast<float*>(out),
                 timeout);
}

}  // namespace phalanx
