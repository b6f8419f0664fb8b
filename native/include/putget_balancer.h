/* putget's balancer: where experts lie, and which replica of an expert a token uses. No ranks talk to each other here.
 *
 * As in putget.h, structures start with their size and a magic number, and functions return a status whose words
 * putget_last_error() has. Memory is the caller's.
 */
#ifndef PUTGET_BALANCER_H
#define PUTGET_BALANCER_H

#include "putget.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PUTGET_MAX_BALANCED_GPUS 4096
#define PUTGET_MAX_BALANCED_SLOTS 65536
#define PUTGET_NO_LIMIT UINT32_MAX

/* One call plans all layers. The same arguments give the same bits on every rank. */
typedef struct putget_balance_args {
  uint32_t size;
  uint32_t magic;
  uint32_t num_layers;
  uint32_t num_experts;
  uint32_t num_replicas; /* slots of all GPUs, as many on each */
  uint32_t num_groups;   /* of experts; where they divide by the nodes, a group stays on one node */
  uint32_t num_nodes;
  uint32_t num_gpus;
  uint32_t max_moves;           /* of a layer: experts that GPUs get; PUTGET_NO_LIMIT: any */
  uint32_t host_store;          /* 1: experts that no live GPU holds can be had elsewhere */
  double min_gain;              /* a layer whose max/mean would fall by less keeps `previous` */
  const double* load;           /* [num_layers, num_experts] */
  const int32_t* previous;      /* [num_layers, num_replicas] the plan in force, or null */
  const uint8_t* dead;          /* [num_gpus] not 0: its slots stay empty; or null */
  int32_t* physical_to_logical; /* [num_layers, num_replicas] the plan: the expert of each slot, -1: none */
} putget_balance_args;

PUTGET_API putget_status putget_balance(const putget_balance_args* args);

#ifdef __cplusplus
}
#endif

#endif
