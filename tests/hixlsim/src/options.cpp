#include "options.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>

#include "acl.hpp"
#include "json.hpp"
#include "settings.hpp"

namespace sim {
namespace {

using hixl::FAILED;
using hixl::PARAM_INVALID;
using hixl::Status;
using hixl::SUCCESS;

template <typename T>
bool to_number(const std::string &text, T &value) {
    std::istringstream stream(text);
    stream >> value;
    return !stream.fail() && stream.eof();
}

// The plain name first, then the alias of the older interface.
const std::string *lookup(const RawOptions &options, const std::string &name) {
    auto found = options.find(name);
    if (found == options.end()) {
        found = options.find("adxl." + name);
    }
    return found == options.end() ? nullptr : &found->second;
}

Status parse_rdma(const RawOptions &options, const char *name, const char *variable, int most, int step) {
    const std::string *given = lookup(options, name);
    std::string text = given == nullptr ? std::string() : *given;
    if (text.empty() && std::getenv(variable) != nullptr) {
        text = std::getenv(variable);
    }
    int value = 0;
    if (!text.empty() && (!to_number(text, value) || value < 0 || value > most || value % step != 0)) {
        log("%s is invalid: %s", name, text.c_str());
        return PARAM_INVALID;
    }
    return SUCCESS;
}

Status parse_flag(const std::string &text, bool &flag) {
    unsigned value = 0;
    if (!to_number(text, value) || value > 1) {
        return PARAM_INVALID;
    }
    flag = value == 1;
    return SUCCESS;
}

// An integer, or a string that holds one; left alone where the key is absent.
template <typename T>
Status parse_integer(const Json &json, const std::string &key, int64_t least, int64_t most, T &value, bool *given = nullptr) {
    const Json *field = json.find(key);
    if (field == nullptr) {
        return SUCCESS;
    }
    int64_t number = field->integer;
    const bool fits = field->kind == Json::Kind::integer || (field->kind == Json::Kind::text && to_number(field->text, number));
    if (!fits || number < least || number > most) {
        log("%s must be in [%lld, %lld]", key.c_str(), static_cast<long long>(least), static_cast<long long>(most));
        return PARAM_INVALID;
    }
    value = static_cast<T>(number);
    if (given != nullptr) {
        *given = true;
    }
    return SUCCESS;
}

Status parse_fabric(const Json &json, const std::string &prefix, Options &options, bool &streams_given) {
    uint64_t ignored = 0;
    Status status = parse_integer(json, prefix + "max_capacity", 1, 1024, ignored);
    status = status != SUCCESS ? status : parse_integer(json, prefix + "start_address", 0, 1024, ignored);
    status = status != SUCCESS ? status : parse_integer(json, prefix + "task_stream_num", 1, 8, options.task_streams, &streams_given);
    const Json *unfold = json.find(prefix + "enable_aicpu_unfold");
    if (unfold != nullptr) {
        if (unfold->kind != Json::Kind::boolean) {
            return PARAM_INVALID;
        }
        options.unfold = unfold->boolean;
    }
    return status;
}

Status parse_protocols(const Json &json, Options &options) {
    const Json *protocols = json.find("comm_resource_config.protocol_desc");
    if (protocols == nullptr) {
        return SUCCESS;
    }
    if (protocols->kind == Json::Kind::text) {
        options.protocols = {protocols->text};
        return SUCCESS;
    }
    if (protocols->kind != Json::Kind::list) {
        return PARAM_INVALID;
    }
    for (const Json &each : protocols->list) {
        if (each.kind != Json::Kind::text) {
            return PARAM_INVALID;
        }
        options.protocols.push_back(each.text);
    }
    return SUCCESS;
}

Status read_comm_res(const std::string &path, std::string &text) {
    char resolved[PATH_MAX];
    if (realpath(path.c_str(), resolved) == nullptr) {
        return PARAM_INVALID;
    }
    const int fd = open(resolved, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    struct stat about {};
    if (fd < 0) {
        return PARAM_INVALID;
    }
    Status status = PARAM_INVALID;
    if (fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0 && about.st_size <= 1 << 20) {
        text.resize(static_cast<size_t>(about.st_size));
        status = read(fd, &text[0], text.size()) == about.st_size ? SUCCESS : PARAM_INVALID;
    }
    close(fd);
    return status;
}

Status parse_resources(const std::string &text, Options &options) {
    Json json;
    if (!Json::parse(text, json) || json.kind != Json::Kind::object) {
        log("GlobalResourceConfig is no JSON object");
        return PARAM_INVALID;
    }
    bool streams_given = false;
    Status status = SUCCESS;
    const Json *nested = json.find("fabric_memory");
    if (nested != nullptr && nested->kind == Json::Kind::object) {
        status = parse_fabric(*nested, "", options, streams_given);
    }
    status = status != SUCCESS ? status : parse_fabric(json, "fabric_memory.", options, streams_given);
    if (status == SUCCESS && options.unfold && streams_given && options.task_streams != 1) {
        status = PARAM_INVALID;
    }
    uint32_t ignored = 0;
    status = status != SUCCESS ? status : parse_integer(json, "connect_pool.thread_num", 1, 64, options.connect_threads);
    status = status != SUCCESS ? status : parse_integer(json, "connect_pool.task_queue_capacity", 1, 65535, options.connect_queue);
    status = status != SUCCESS ? status : parse_protocols(json, options);
    status = status != SUCCESS ? status : parse_integer(json, "comm_resource_config.listen_port", 1, 65535, ignored);
    status = status != SUCCESS ? status : parse_integer(json, "comm_resource_config.qos", 0, 7, ignored);
    status = status != SUCCESS ? status
                               : parse_integer(json, "comm_resource_config.max_active_channels", 1, UINT32_MAX, options.active_channels);
    const Json *path = json.find("local_comm_res_path");
    if (status != SUCCESS || path == nullptr) {
        return status;
    }
    if (path->kind != Json::Kind::text || path->text.empty()) {
        return PARAM_INVALID;
    }
    return options.comm_res.empty() ? read_comm_res(path->text, options.comm_res) : SUCCESS;
}

// COMM reads channel_pool.* a second time, from values turned into text.
Status parse_channel_pool(const std::string &text, Options &options) {
    Json json;
    if (text.empty() || !Json::parse(text, json)) {
        return SUCCESS;
    }
    const auto ratio = [&json](const char *key, double &value) {
        const Json *field = json.find(key);
        if (field == nullptr) {
            return true;
        }
        value = field->kind == Json::Kind::real ? field->real : static_cast<double>(field->integer);
        const bool number = field->kind != Json::Kind::text || to_number(field->text, value);
        return number && value > 0 && value < 1;
    };
    double high = -1;
    double low = -1;
    bool given = false;
    const Status status = parse_integer(json, "channel_pool.max_channel", 1, 512, options.max_channel, &given);
    if (status != SUCCESS || !ratio("channel_pool.high_waterline", high) || !ratio("channel_pool.low_waterline", low)) {
        return PARAM_INVALID;
    }
    options.channel_pool = high > 0 && low > 0;
    if (!options.channel_pool) {
        return given ? PARAM_INVALID : SUCCESS;
    }
    const auto mark = [&options](double share) { return std::max<size_t>(static_cast<size_t>(static_cast<double>(options.max_channel) * share), 1); };
    options.high_mark = mark(high);
    options.low_mark = mark(low);
    return options.high_mark > options.low_mark ? SUCCESS : PARAM_INVALID;
}

Status parse_pool(const std::string &text) {
    if (text.empty() || text == "0:0") {
        return SUCCESS;
    }
    const size_t colon = text.find(':');
    uint64_t number = 0;
    uint64_t size = 0;
    const bool good = colon != std::string::npos && to_number(text.substr(0, colon), number) && to_number(text.substr(colon + 1), size) &&
                      number > 0 && size > 0;
    return good ? SUCCESS : PARAM_INVALID;
}

bool is_endpoint(const std::string &text) {
    static const std::set<std::string> known = {"roce:device", "hccs:device", "ub_ctp:device", "uboe:device",
                                                "ub_rtp:device", "roce:host", "ub_ctp:host"};
    return known.count(text) != 0;
}

// LocalCommRes 1.3: without endpoints the library makes its own of what the devices offer.
Status parse_endpoints(Options &options) {
    if (!options.comm_res.empty()) {
        Json json;
        if (!Json::parse(options.comm_res, json)) {
            return PARAM_INVALID;
        }
        const Json *list = json.find("endpoint_list");
        if (list != nullptr && list->kind != Json::Kind::list) {
            return PARAM_INVALID;
        }
        for (const Json &each : list == nullptr ? std::vector<Json>() : list->list) {
            const Json *protocol = each.find("protocol");
            const Json *placement = each.find("placement");
            if (protocol == nullptr || placement == nullptr || !is_endpoint(protocol->text + ":" + placement->text)) {
                return PARAM_INVALID;
            }
            options.endpoints.insert(protocol->text + ":" + placement->text);
            options.host_endpoint = placement->text == "host";
        }
        return SUCCESS;
    }
    for (const std::string &each : options.protocols) {
        if (!is_endpoint(each)) {
            return PARAM_INVALID;
        }
        options.endpoints.insert(each);
        options.host_endpoint = each.find(":host") != std::string::npos;
    }
    return SUCCESS;
}

}  // namespace

Status Options::parse(const RawOptions &options) {
    raw = options;
    Status status = parse_rdma(options, "RdmaTrafficClass", "HCCL_RDMA_TC", 255, 4);
    status = status != SUCCESS ? status : parse_rdma(options, "RdmaServiceLevel", "HCCL_RDMA_SL", 7, 1);
    if (status != SUCCESS) {
        return status;
    }
    const std::string *res = lookup(options, "LocalCommRes");
    comm_res = res == nullptr ? std::string() : *res;
    const auto enable = options.find("EnableUseFabricMem");
    if (enable != options.end() && !enable->second.empty()) {
        status = parse_flag(enable->second, fabric);
    }
    const auto connect = options.find("AutoConnect");
    if (status == SUCCESS && connect != options.end()) {
        status = parse_flag(connect->second, auto_connect);
    }
    const auto resources = options.find("GlobalResourceConfig");
    if (status == SUCCESS && resources != options.end() && !resources->second.empty()) {
        status = parse_resources(resources->second, *this);
    }
    return status;
}

Status Options::choose(Backend &backend) const {
    const std::string forced = environment("BACKEND");
    if (!forced.empty()) {
        if (forced != "comm" && forced != "cs" && forced != "fab") {
            die("HIXLSIM_BACKEND=%s is none of comm, cs, fab", forced.c_str());
        }
        backend = forced == "comm" ? Backend::comm : forced == "cs" ? Backend::cs : Backend::fab;
        return SUCCESS;
    }
    if (fabric) {
        backend = Backend::fab;
        return SUCCESS;
    }
    if (!comm_res.empty()) {
        Json json;
        if (!Json::parse(comm_res, json)) {
            return PARAM_INVALID;
        }
        const Json *version = json.find("version");
        backend = version != nullptr && version->kind == Json::Kind::text && version->text == "1.3" ? Backend::cs : Backend::comm;
        return SUCCESS;
    }
    const bool new_soc = std::string(aclrtGetSocName()).find("Ascend950") != std::string::npos;
    backend = !protocols.empty() || new_soc ? Backend::cs : Backend::comm;
    return SUCCESS;
}

// HIXLSIM_OPTIONS, "KEY=VALUE,...".
static std::map<std::string, std::string> later_options() {
    std::map<std::string, std::string> all;
    std::istringstream stream(environment("OPTIONS"));
    for (std::string pair; std::getline(stream, pair, ',');) {
        all[pair.substr(0, pair.find('='))] = pair.substr(std::min(pair.size(), pair.find('=') + 1));
    }
    return all;
}

Status Options::check(Backend backend) {
    static const std::set<std::string> known = {
        "RdmaTrafficClass", "adxl.RdmaTrafficClass", "RdmaServiceLevel", "adxl.RdmaServiceLevel", "LocalCommRes", "adxl.LocalCommRes",
        "BufferPool", "adxl.BufferPool", "AutoConnect", "GlobalResourceConfig", "EnableUseFabricMem"};
    const auto later = later_options();
    for (const auto &each : later) {
        const auto given = raw.find(each.first);
        if (given == raw.end() || given->second != each.second) {
            log("%s must be %s", each.first.c_str(), each.second.c_str());
            return PARAM_INVALID;
        }
    }
    for (const auto &each : raw) {
        if ((known.count(each.first) == 0 && later.count(each.first) == 0) || (backend == Backend::cs && each.first == "EnableUseFabricMem")) {
            log("unsupported option %s", each.first.c_str());
            return PARAM_INVALID;
        }
    }
    const std::string *pool = lookup(raw, "BufferPool");
    if (backend == Backend::comm) {
        const auto resources = raw.find("GlobalResourceConfig");
        if (resources != raw.end() && resources->second.empty()) {
            return PARAM_INVALID;  // its second reading wants JSON
        }
        const Status status = pool == nullptr ? SUCCESS : parse_pool(*pool);
        return status != SUCCESS || resources == raw.end() ? status : parse_channel_pool(resources->second, *this);
    }
    if (pool != nullptr && *pool != "0:0") {
        return PARAM_INVALID;
    }
    if (backend == Backend::fab) {
        return unfold && !settings().aicpu ? hixl::UNSUPPORTED : SUCCESS;
    }
    const Status status = parse_endpoints(*this);
    const std::string forced = environment("CS");
    host_endpoint = forced.empty() ? host_endpoint : forced == "host";
    return status;
}

bool Options::meets(const std::string &others) const {
    std::istringstream names(others);
    std::string name;
    bool any = endpoints.empty() || others.empty();
    while (names >> name) {
        any = any || endpoints.count(name) != 0;
    }
    return any;
}

std::string Options::endpoint_names() const {
    std::string names;
    for (const std::string &each : endpoints) {
        names += each + " ";
    }
    return names;
}

Status parse_engine(const std::string &text, std::string &ip, int &port) {
    const size_t left = text.find('[');
    const size_t right = text.find(']');
    const bool six = left != std::string::npos && right != std::string::npos && left < right;
    const size_t colon = text.find(':', six ? right : 0);
    ip = six ? text.substr(left + 1, right - left - 1) : text.substr(0, colon);
    unsigned char bytes[sizeof(struct in6_addr)];
    if (inet_pton(AF_INET, ip.c_str(), bytes) != 1 && inet_pton(AF_INET6, ip.c_str(), bytes) != 1) {
        return PARAM_INVALID;
    }
    port = 0;
    std::string digits = colon == std::string::npos ? std::string() : text.substr(colon + 1);
    if (!six) {
        digits = digits.substr(0, digits.find(':'));
    }
    return colon == std::string::npos || to_number(digits, port) ? SUCCESS : PARAM_INVALID;
}

}  // namespace sim
