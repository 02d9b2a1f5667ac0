// The table that chooses a softmax kernel: every row fits what is chosen for it.
#include "cuda/softmax/select.h"

#include <gtest/gtest.h>

namespace flashattn::cuda {
namespace {

constexpr RowLimits kHopperFloatForward{.multiprocessors = 132,
                                        .cluster = 16,
                                        .shared_chunks = 14016,
                                        .chunk_elements = 4,
                                        .whole_chunks = true,
                                        .few_elements = 8,
                                        .more_elements = 16,
                                        .held_chunks = 8,
                                        .block_threads = 256,
                                        .held_cluster = 4};

RowLimits any_alignment(RowLimits limits) {
  limits.whole_chunks = false;
  return limits;
}

RowLimits alike(RowLimits limits) {
  limits.whole_chunks = false;
  limits.alike = true;
  return limits;
}

RowLimits without_clusters(RowLimits limits) {
  limits.cluster = 1;
  return limits;
}

RowLimits with_small_clusters(RowLimits limits) {
  limits.cluster = 8;
  return limits;
}

RowLimits half_backward(RowLimits limits) {
  limits.chunk_elements = 8;
  limits.shared_chunks /= 2;
  limits.few_elements = limits.more_elements = 8;
  limits.held_chunks = 4;
  limits.block_threads = 512;
  limits.held_cluster = kAnyCluster;
  return limits;
}

void expect_fits(int64_t rows, int64_t length, const RowLimits& limits) {
  SCOPED_TRACE(testing::Message() << rows << " rows of " << length);
  const RowPlan plan = select_row_kernel(rows, length, limits);
  const int64_t chunks =
      (length + (limits.whole_chunks ? 0 : limits.chunk_elements - 1) + limits.chunk_elements - 1) /
      limits.chunk_elements;
  ASSERT_GE(plan.threads, 32);
  ASSERT_LE(plan.threads, 1024);
  ASSERT_EQ(plan.threads % 32, 0);
  switch (plan.kernel) {
    case RowKernel::warp:
      EXPECT_GE(int64_t{plan.lanes} * plan.elements, length);
      EXPECT_EQ(plan.threads % plan.lanes, 0);
      break;
    case RowKernel::block:
      EXPECT_TRUE(limits.whole_chunks);
      EXPECT_GE(int64_t{plan.threads} * plan.elements, length);
      break;
    case RowKernel::held_in_registers:
      EXPECT_TRUE(limits.whole_chunks);
      EXPECT_EQ(plan.capacity, plan.threads * limits.held_chunks);
      EXPECT_GE(int64_t{plan.capacity} * plan.cluster, chunks);
      break;
    case RowKernel::held_in_both:
      EXPECT_TRUE(limits.whole_chunks);
      EXPECT_LT(limits.held_cluster, kAnyCluster);
      EXPECT_GE(int64_t{plan.capacity} * plan.cluster, chunks);
      EXPECT_LE(plan.capacity - plan.threads * limits.held_chunks, limits.shared_chunks / 2);
      break;
    case RowKernel::held_between_edges:
      EXPECT_TRUE(limits.alike && !limits.whole_chunks);
      EXPECT_EQ(plan.capacity, plan.threads * limits.held_chunks);
      EXPECT_GE(int64_t{plan.capacity} * plan.cluster, length / limits.chunk_elements);
      EXPECT_GE(plan.threads, 2 * limits.chunk_elements);  // a lane for each edge element
      EXPECT_LE(plan.cluster, 8);
      break;
    case RowKernel::held_in_shared:
      EXPECT_LE(plan.capacity, limits.shared_chunks);
      EXPECT_GE(int64_t{plan.capacity} * plan.cluster, chunks);
      break;
    case RowKernel::online:
      EXPECT_EQ(plan.threads, 256);
      EXPECT_GE(plan.pieces, 1);
      EXPECT_LE(plan.pieces, 1024);
      EXPECT_LE(plan.capacity, limits.shared_chunks);
      break;
  }
  EXPECT_LE(plan.cluster, limits.cluster);
  EXPECT_EQ(plan.cluster & (plan.cluster - 1), 0);
}

TEST(SelectRowKernel, EveryRowFits) {
  for (const RowLimits& limits :
       {kHopperFloatForward, any_alignment(kHopperFloatForward), alike(kHopperFloatForward),
        alike(half_backward(kHopperFloatForward)), alike(without_clusters(kHopperFloatForward)),
        without_clusters(kHopperFloatForward), with_small_clusters(kHopperFloatForward),
        half_backward(kHopperFloatForward), with_small_clusters(half_backward(kHopperFloatForward)),
        without_clusters(any_alignment(half_backward(kHopperFloatForward)))}) {
    for (const int64_t rows : {int64_t{1}, int64_t{7}, int64_t{200}, int64_t{1} << 33}) {
      for (int64_t length = limits.chunk_elements; length < int64_t{1} << 34;
           length +=
           length / 7 / limits.chunk_elements * limits.chunk_elements + limits.chunk_elements) {
        expect_fits(rows, length, limits);
      }
    }
  }
}

TEST(SelectRowKernel, LongerRowsTakeLargerKernels) {
  const auto kernel = [](int64_t length) {
    return select_row_kernel(1 << 20, length, kHopperFloatForward).kernel;
  };
  EXPECT_EQ(kernel(256), RowKernel::warp);
  EXPECT_EQ(kernel(260), RowKernel::block);
  EXPECT_EQ(kernel(4096), RowKernel::block);
  EXPECT_EQ(kernel(4100), RowKernel::held_in_registers);
  EXPECT_EQ(kernel(1 << 16), RowKernel::held_in_registers);
  EXPECT_EQ(kernel(1 << 17), RowKernel::held_in_both);
  EXPECT_EQ(kernel(1 << 18), RowKernel::held_in_both);
  EXPECT_EQ(kernel(1 << 20), RowKernel::online);
}

TEST(SelectRowKernel, FewRowsAreSpread) {
  EXPECT_EQ(select_row_kernel(1000, 16384, kHopperFloatForward).cluster, 1);
  EXPECT_EQ(select_row_kernel(4, 65536, kHopperFloatForward).cluster, 8);
  EXPECT_EQ(select_row_kernel(1, int64_t{1} << 26, kHopperFloatForward).pieces, 1024);
}

TEST(SelectColumnKernel, LanesAndLinesMakeWholeWarps) {
  for (const int64_t packs : {1, 2, 3, 31, 32, 33, 100000}) {
    for (const int64_t length : {1, 2, 63, 64, 65, 100000}) {
      const ColumnPlan plan = select_column_kernel(packs, length, 4, 8);
      EXPECT_EQ(plan.threads % 32, 0);
      EXPECT_EQ(plan.threads % plan.lanes, 0);
      EXPECT_LE(plan.threads, 512);
      EXPECT_LE(plan.lanes, 32);
    }
  }
}

TEST(SelectColumnKernel, FewerLanesHoldWholeColumns) {
  EXPECT_EQ(select_column_kernel(1 << 20, 256, 16, 8).lanes, 32);
  EXPECT_EQ(select_column_kernel(1 << 20, 512, 16, 8).lanes, 16);
  EXPECT_EQ(select_column_kernel(1 << 20, 1024, 16, 8).lanes, 8);
  EXPECT_EQ(select_column_kernel(1 << 20, 4096, 16, 8).lanes, 8);
  EXPECT_EQ(select_column_kernel(2, 1024, 16, 8).lanes, 2);
}

}  // namespace
}  // namespace flashattn::cuda
