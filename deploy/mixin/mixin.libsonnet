// The rules and the dashboards as a monitoring mixin, read from the files that everything else uses.
{
  // jsonnet's YAML knows no anchors, and the file has one.
  local text = importstr '../../alerts/rules/headroom.yaml',
  local model = std.split(std.split(text, '&model ')[1], '}\n')[0],
  local rules = std.parseYaml(std.strReplace(std.strReplace(text, '&model ', ''), '*model', model)),
  local holds_alerts(group) = std.length([rule for rule in group.rules if 'alert' in rule]) > 0,

  prometheusAlerts+:: { groups+: [group for group in rules.groups if holds_alerts(group)] },
  prometheusRules+:: { groups+: [group for group in rules.groups if !holds_alerts(group)] },
  grafanaDashboards+:: {
    'headroom.json': import '../../dashboards/headroom.json',
    'headroom-fleet.json': import '../../dashboards/headroom-fleet.json',
    'headroom-incident.json': import '../../dashboards/headroom-incident.json',
  },
}
