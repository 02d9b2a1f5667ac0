// Allocation of attention's gradients: the six (packed: five) results, and the accumulators of
// those that are summed over broadcast dimensions.
#pragma once

#include <optional>

#include "ops/attention_arguments.h"

namespace flashattn::ops {

// Which gradients to compute, by the order of the results.
struct Wanted {
  bool query, key, value, mask, alibi, sinks;
};

// How the gradients of query, key and value start: at zero, for kernels that write only what some
// pair reaches, or as they come, for those that write everything. Sums start at zero.
enum class Start : uint8_t { zero, unwritten };

class Gradients {
 public:
  Gradients(const Tensor& query, const Tensor& key, const Tensor& value,
            const OptionalTensor& attn_mask, const ScoreOptions& options, Wanted wanted,
            Start start = Start::zero);

  // Where the kernels write; absent for what is not wanted.
  const BackwardOutputs& outputs() const { return outputs_; }

  // The sums behind them, where the caller adds up; nothing for what is not wanted.
  const OptionalTensor& mask_sum() const { return mask_.sum; }
  const OptionalTensor& alibi_sum() const { return alibi_.sum; }
  const OptionalTensor& sinks_sum() const { return sinks_.sum; }

  // The results, in the dtypes and shapes of their inputs; zero-size when not wanted.
  const Tensor& query() const { return query_; }
  const Tensor& key() const { return key_; }
  const Tensor& value() const { return value_; }
  Tensor mask() const;
  Tensor alibi() const;
  Tensor sinks() const;

 private:
  // A sum in the accumulator type, and the input whose gradient it becomes.
  struct Sum {
    OptionalTensor input, sum;
  };
  Tensor finish(const Sum& sum) const;

  Tensor query_, key_, value_;
  Sum mask_, alibi_, sinks_;
  BackwardOutputs outputs_;
};

}  // namespace flashattn::ops
