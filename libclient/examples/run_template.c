/* Runs the small MLP template on the daemon, from C and nothing but slice.h:
 *
 *   run_template SOCKET TEMPLATE.pb [ROWS]
 *
 * TEMPLATE.pb is tests/golden/mlp.textproto in binary form (the build makes it in <build>/golden/).
 * It computes relu(x[s,16] @ w1[16,32]) @ w2[32,8] in float32, with one symbol s of 1..64; static
 * inputs are w1 and w2, in this order. The program compares the result with a loop of its own. Exit
 * status: 0 equal, 1 different or failed, 2 usage.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "slice/slice.h"

enum { IN = 16, HIDDEN = 32, OUT = 8, ROWS_MAX = 64 };
enum { W1_BYTES = IN * HIDDEN * sizeof(float), W2_BYTES = HIDDEN * OUT * sizeof(float) };
enum { WEIGHTS_BYTES = W1_BYTES + W2_BYTES }; /* W1_BYTES is a multiple of 64, as offsets must be */

#define CHECK(call)                                                              \
  do {                                                                           \
    const slice_status_t check_status = (call);                                  \
    if (check_status != SLICE_OK) {                                              \
      fprintf(stderr, "run_template: %s: %s\n", slice_status_name(check_status), \
              slice_last_error());                                               \
      goto out;                                                                  \
    }                                                                            \
  } while (0)

/* Small numbers of both signs, the same in every run. */
static float number(uint32_t i) { return (float)((i * 2654435761u >> 24) % 17) / 8.0f - 1.0f; }

static void expected(const float* x, const float* w1, const float* w2, int rows, float* y) {
  for (int r = 0; r < rows; ++r) {
    float hidden[HIDDEN];
    for (int h = 0; h < HIDDEN; ++h) {
      float sum = 0;
      for (int i = 0; i < IN; ++i) sum += x[r * IN + i] * w1[i * HIDDEN + h];
      hidden[h] = sum > 0 ? sum : 0;
    }
    for (int o = 0; o < OUT; ++o) {
      float sum = 0;
      for (int h = 0; h < HIDDEN; ++h) sum += hidden[h] * w2[h * OUT + o];
      y[r * OUT + o] = sum;
    }
  }
}

/* The weights in a memfd that cannot shrink any more: what slice_tensor_import asks for. Returns -1
 * on failure. */
static int make_weights(float** weights) {
  const int fd = memfd_create("run-template-weights", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  void* memory = MAP_FAILED;
  if (ftruncate(fd, WEIGHTS_BYTES) == 0 &&
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0) {
    memory = mmap(NULL, WEIGHTS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (memory == MAP_FAILED) {
    close(fd);
    return -1;
  }
  *weights = memory;
  for (uint32_t i = 0; i < WEIGHTS_BYTES / sizeof(float); ++i) (*weights)[i] = number(i);
  return fd;
}

static void* read_file(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  char* bytes = NULL;
  if (file == NULL) return NULL;
  if (fseek(file, 0, SEEK_END) == 0) {
    const long end = ftell(file);
    rewind(file);
    if (end > 0 && (bytes = malloc((size_t)end)) != NULL) {
      *size = fread(bytes, 1, (size_t)end, file);
      if (*size != (size_t)end) {
        free(bytes);
        bytes = NULL;
      }
    }
  }
  fclose(file);
  return bytes;
}

static slice_tensor_spec_t matrix(const char* name, int64_t rows, int64_t columns,
                                  uint64_t offset) {
  slice_tensor_spec_t spec;
  memset(&spec, 0, sizeof spec);
  spec.size = sizeof spec;
  spec.name = name;
  spec.dtype = SLICE_DTYPE_FLOAT32;
  spec.dim_count = 2;
  spec.sizes[0] = rows;
  spec.sizes[1] = columns;
  spec.strides[0] = columns;
  spec.strides[1] = 1;
  spec.offset = offset;
  return spec;
}

int main(int argc, char** argv) {
  const int rows = argc > 3 ? atoi(argv[3]) : 5;
  if (argc < 3 || rows < 1 || rows > ROWS_MAX) {
    fprintf(stderr, "usage: run_template SOCKET TEMPLATE.pb [ROWS 1..%d]\n", ROWS_MAX);
    return 2;
  }
  int exit_status = 1;
  slice_session_t* session = NULL;
  float* weights = NULL;
  size_t template_bytes = 0;
  void* template = read_file(argv[2], &template_bytes);
  const int weights_fd = make_weights(&weights);
  if (template == NULL || weights_fd < 0) {
    fprintf(stderr, "run_template: cannot read %s or cannot make a memfd\n", argv[2]);
    goto out;
  }

  slice_session_options_t options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.socket_path = argv[1];
  options.name = "run_template";
  options.arena_bytes = 1 << 20;
  CHECK(slice_session_open(&options, &session));

  /* Once: weights, graph, binding. */
  const slice_tensor_spec_t specs[2] = {matrix("w1", IN, HIDDEN, 0),
                                        matrix("w2", HIDDEN, OUT, W1_BYTES)};
  slice_tensor_t tensors[2];
  slice_graph_t graph;
  slice_binding_t binding;
  CHECK(slice_tensor_import(session, weights_fd, SLICE_TENSOR_CONSTANT, specs, 2, tensors));
  CHECK(slice_graph_register(session, template, template_bytes, &graph));
  CHECK(slice_binding_create(session, graph, tensors, 2, &binding));

  /* Each request: input and result slots, a sequence, a submit. */
  slice_slot_t input = {0, (uint64_t)rows * IN * sizeof(float)};
  slice_slot_t output = {0, (uint64_t)rows * OUT * sizeof(float)};
  void* input_memory = NULL;
  void* output_memory = NULL;
  CHECK(slice_arena_alloc(session, input.bytes, &input.offset, &input_memory));
  CHECK(slice_arena_alloc(session, output.bytes, &output.offset, &output_memory));
  float* x = input_memory;
  for (int i = 0; i < rows * IN; ++i) x[i] = number((uint32_t)i + 1000);

  slice_sequence_t sequence;
  CHECK(slice_sequence_open(session, NULL, &sequence));
  const int64_t symbols[1] = {rows};
  slice_submit_args_t args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.binding = binding;
  args.sequence = sequence;
  args.symbols = symbols;
  args.symbol_count = 1;
  args.inputs = &input;
  args.input_count = 1;
  args.outputs = &output;
  args.output_count = 1;
  slice_ticket_t ticket;
  slice_completion_t completion;
  memset(&completion, 0, sizeof completion);
  completion.size = sizeof completion;
  CHECK(slice_submit(session, &args, &ticket));
  CHECK(slice_wait(session, ticket, -1, &completion));
  CHECK(slice_sequence_close(session, sequence));

  float y[ROWS_MAX * OUT];
  const float* got = output_memory;
  int wrong = 0;
  expected(x, weights, weights + IN * HIDDEN, rows, y);
  for (int r = 0; r < rows; ++r) {
    for (int o = 0; o < OUT; ++o) {
      const int i = r * OUT + o;
      const float difference = got[i] > y[i] ? got[i] - y[i] : y[i] - got[i];
      if (!(difference <= 1e-4f * (1.0f + (y[i] < 0 ? -y[i] : y[i]))))
        ++wrong; /* NaN is wrong, too */
      printf("%s%9.4f", o == 0 ? "" : " ", (double)got[i]);
    }
    printf("\n");
  }
  printf("%d of %d numbers wrong; %.3f ms from submit to finish\n", wrong, rows * OUT,
         (double)(completion.finish_ns - completion.submit_ns) / 1e6);

  CHECK(slice_arena_free(session, input.offset));
  CHECK(slice_arena_free(session, output.offset));
  CHECK(slice_binding_destroy(session, binding));
  CHECK(slice_graph_unregister(session, graph));
  CHECK(slice_tensor_release(session, tensors, 2));
  exit_status = wrong == 0 ? 0 : 1;

out:
  slice_session_close(session);
  if (weights_fd >= 0) {
    munmap(weights, WEIGHTS_BYTES);
    close(weights_fd);
  }
  free(template);
  return exit_status;
}
