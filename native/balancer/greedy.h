// A first plan: replicas for the experts whose replicas have the most load, then the heaviest item to the lightest bin.
// The method is that of DeepSeek's expert-parallel load balancer (EPLB, github.com/deepseek-ai/EPLB).
#pragma once

#include <cstdint>
#include <vector>

namespace putget::balancer {

// The bin of each item, every bin with as many items: the heaviest item goes to the lightest bin that has room. Equal
// ones: the first.
std::vector<uint32_t> pack(const std::vector<double>& weight, uint32_t num_bins);

// The expert of each of `num_replicas` replicas: each one once, then again and again the one with the most load a
// replica. This makes the largest load of a replica as small as it can be.
std::vector<uint32_t> replicate(const std::vector<double>& weight, uint32_t num_replicas);

}  // namespace putget::balancer
